-- What a machine may reach, as the text of its egress policy; NULL in records from before there were policies.
ALTER TABLE machines ADD COLUMN egress :text;
