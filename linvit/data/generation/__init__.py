"""Images and latents to generate."""
