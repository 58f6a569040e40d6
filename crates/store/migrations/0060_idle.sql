-- What becomes of a machine at the end of its idle timeout, and whether it comes back from a pause by itself; NULL: it ends, it does not.
ALTER TABLE machines ADD COLUMN on_idle :text;
ALTER TABLE machines ADD COLUMN auto_resume :int;
