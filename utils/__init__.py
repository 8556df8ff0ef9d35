"""What the three training scripts share; each module holds one topic."""
