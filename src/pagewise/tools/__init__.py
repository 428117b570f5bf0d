"""Tools that lessons and modules share."""
