"""How cost grows with what is waiting, with what runs, with the payload, the workers and the way to the database."""
