"""Random straight-line PTX against a scalar interpreter."""
