"""Parts of sessions: how one is held still, its inside for images, and its releases."""
