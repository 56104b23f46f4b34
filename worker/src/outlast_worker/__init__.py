"""outlast-worker."""
