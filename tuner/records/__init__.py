"""Records of studies: the journal on disk, what is read back from it, and MLflow."""
