"""Define what every API of a gateway is built from; it names none of them."""
