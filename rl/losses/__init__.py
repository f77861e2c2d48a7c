"""The policy losses: `recipes` names them without torch; `total` computes them on packed tensors."""
