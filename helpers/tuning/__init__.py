"""A model and its prefix: attach, train, save, load, generate."""
