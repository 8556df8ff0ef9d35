"""What a run needs on a real cluster: launchers, the rendezvous, the names of lost ranks."""
