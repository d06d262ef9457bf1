"""Generation: requests, the choices of a response and its usage, without names of any API."""
