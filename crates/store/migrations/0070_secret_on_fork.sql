-- What a fork gives its children of a secret; NULL: nothing.
ALTER TABLE machine_secrets ADD COLUMN on_fork :text;
