"""How fast a kernel could be on this GPU, and how close it came."""
