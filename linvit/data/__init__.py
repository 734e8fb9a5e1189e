"""Batches of labelled images, text and speech: each source is a LightningDataModule."""
