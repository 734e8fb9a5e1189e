"""Images and latents that a generator learns."""
