//! What `FROM` names: a template of this host, or an image of a container, which becomes one.

use mainbrella_engine::image::oci::Reference;
use mainbrella_types::{SizeClass, TemplateName};
use sha2::{Digest, Sha256};
use tokio::sync::mpsc;

use crate::carry::Work;
use crate::failure::{Failure, Halt, Reason};
use crate::ground::{BaseKind, BaseTemplate};

/// How an image that is a file of the host begins.
const HOST_FILE: &str = "local:";

fn refused(message: impl Into<String>) -> Halt {
    Failure::new(Reason::Base, message).into()
}

/// The name of the template that an image of a container becomes.
fn name_of(reference: &Reference) -> Result<TemplateName, Failure> {
    let digest = hex::encode(Sha256::digest(reference.to_string().as_bytes()));
    format!("image-{}", &digest[..12]).parse().map_err(Failure::internal)
}

/// The base, and the size that is built in.
pub(crate) async fn find(work: &Work, from: &str) -> Result<(BaseTemplate, SizeClass), Halt> {
    if from.starts_with(HOST_FILE) {
        return Err(refused(format!(
            "`{from}` is a file of the host, which builds do not reach; make a template of it there with `mainbrella template \
             import`, and begin with that"
        )));
    }
    let base = if from.contains('/') { image(work, from).await? } else { template(work, from).await? };
    let size = match (&base.kind, work.request.size) {
        (BaseKind::Full, _) => {
            return Err(refused(format!(
                "{} is a machine with its memory; a recipe begins with a template that has only a disk",
                base.name
            )));
        }
        (BaseKind::Built { size, .. }, Some(asked)) if *size != asked => {
            return Err(refused(format!(
                "{} was built in size {size}, so this is built in it, too; leave size out",
                base.name
            )));
        }
        (BaseKind::Built { size, .. }, _) => *size,
        (BaseKind::Image, asked) => asked.unwrap_or(SizeClass::Small),
    };
    Ok((base, size))
}

async fn template(work: &Work, from: &str) -> Result<BaseTemplate, Halt> {
    let none = || {
        refused(format!(
            "there is no template `{from}` on this host, and no default registry; name the registry of an image, as in \
             registry.example.org/NAME:TAG"
        ))
    };
    let name: TemplateName = from.parse().map_err(|_| none())?;
    let found = work.ground.template(&name).await.map_err(|e| Failure::of(Reason::Base, &e))?;
    found.ok_or_else(none)
}

async fn image(work: &Work, from: &str) -> Result<BaseTemplate, Halt> {
    let reference: Reference = from.parse().map_err(|e| refused(format!("{e}")))?;
    let name = name_of(&reference)?;
    let look = || async { work.ground.template(&name).await.map_err(|e| Failure::of(Reason::Base, &e)) };
    if !work.request.pull
        && let Some(found) = look().await?
    {
        return Ok(found);
    }
    work.notice(format!("fetching {reference}"));
    let (tell, mut told) = mpsc::channel::<String>(16);
    let import = work.ground.import(&name, from, tell, work.cancel.clone());
    let listen = async {
        while let Some(line) = told.recv().await {
            work.notice(line);
        }
    };
    let (imported, ()) = tokio::join!(import, listen);
    work.go_on()?;
    imported.map_err(|e| Failure::of(Reason::Base, &e))?;
    look().await?.ok_or_else(|| Failure::internal("an image was imported and is not there").into())
}
