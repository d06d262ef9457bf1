"""The mesh on one machine: servers and services as child processes. Start reading in run.py."""
