"""From logits to tokens. Each feature is a state object with the verbs add, remove and apply."""
