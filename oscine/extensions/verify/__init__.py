"""`oscine verify`: a model against an independent implementation, layer by layer, and what it answers."""
