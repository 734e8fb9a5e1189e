"""Speech with its transcripts."""
