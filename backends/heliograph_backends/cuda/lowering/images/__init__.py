"""Ops of images, volumes and signals as launches: convolutions, windows, and elements that change
places."""
