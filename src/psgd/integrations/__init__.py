"""Second-order steps inside training frameworks. Nothing here is imported unless asked for."""
