"""The model families; importing this package registers them with timm."""
