"""Station 4: from decisions to tokens. One package per engine."""
