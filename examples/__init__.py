"""Programs that show what jttt is for; run them from the root of a checkout."""
