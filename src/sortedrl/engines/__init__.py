"""Station 4: from decisions to tokens. One module per engine."""
