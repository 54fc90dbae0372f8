"""Station 7: update batches become new weights; the only home of gradients."""
