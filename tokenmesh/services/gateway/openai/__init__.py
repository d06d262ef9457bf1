"""OpenAI's names, in and out: request models, errors, response shapes. They stop here."""
