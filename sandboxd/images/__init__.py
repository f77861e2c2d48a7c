"""Images for the namespace backend: imported once into a store, then the lower layers of its sandboxes."""
