"""Container images: the engine, a base image that needs no registry, the images, and their tests."""
