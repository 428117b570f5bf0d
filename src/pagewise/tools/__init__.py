"""What lessons and modules share and no lesson is about."""
