"""The parts of `benchmarks.fuzz`: bodies from the OpenAPI document, mutations, who sends them."""
