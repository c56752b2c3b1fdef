"""Sessions on disk: their images, the folder with them, and how they are taken and restored."""
