"""How the embedded model oscine-nano is made: generated conversations, training, export and evaluation."""
