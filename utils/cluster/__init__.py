"""What keeps a training alive on a real cluster: launch, meeting, failures, stops, run folder."""
