"""Container images: the engine, a base for where no registry can be reached, the images, and their tests."""
