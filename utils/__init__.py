"""What the three training scripts share. Each module has one topic."""
