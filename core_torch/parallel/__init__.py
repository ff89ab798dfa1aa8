"""A replica cut in other ways than by rows of its parameters: over tp and pp."""
