"""Publishing: whole rows of an agent's file go to the database that several agents share."""
