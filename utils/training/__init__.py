"""What stands around the loop: flags, first pass, folder, checkpoints, position, reports."""
