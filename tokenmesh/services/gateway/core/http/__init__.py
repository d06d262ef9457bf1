"""HTTP/1.1 and websockets: connections, bodies and responses, with their bounds."""
