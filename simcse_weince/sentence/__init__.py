"""SimCSE on top of sentence-transformers: encoder, corpus, graded pairs, STS suite, arguments and trainer."""
