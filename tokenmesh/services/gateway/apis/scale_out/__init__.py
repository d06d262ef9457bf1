"""Frontend and engine apart: render, generate and derender exchange token ids over HTTP."""
