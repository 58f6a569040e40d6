-- The machine a machine was forked from, as ID@CREATED_AT; NULL for those made from a template.
ALTER TABLE machines ADD COLUMN forked_from :text;
