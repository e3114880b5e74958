"""`ei up`: a local cluster as processes of this machine."""
