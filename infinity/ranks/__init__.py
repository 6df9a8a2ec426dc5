"""One model over several processes: ZeRO-3 over what the tiers of each rank hold."""
