"""One model on several ranks: which part each has, what they sum, how plans reach them."""
