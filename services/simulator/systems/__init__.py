"""Compared systems, one file each; `catalogue` knows them by id."""
