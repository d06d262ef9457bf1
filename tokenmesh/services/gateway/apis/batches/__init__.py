"""The Batch API: requests of an uploaded file, run at low priority; their answers are files."""
