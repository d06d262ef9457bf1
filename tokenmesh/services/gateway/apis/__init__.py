"""The APIs that clients speak: each is one package, whose api.py says what it needs."""
