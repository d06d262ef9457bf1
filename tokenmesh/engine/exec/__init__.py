"""The torch runner: carries out the scheduler's plans on one model and one device."""
