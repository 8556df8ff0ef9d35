"""What a run needs on a real cluster: launchers, the meeting of ranks, the names of lost ranks."""
